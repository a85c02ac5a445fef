"""What compiler and hardware would refuse: rules over a whole Program and its source."""
