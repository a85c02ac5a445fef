"""What the driver `main.py` is made of; every module says in its docstring what it is for."""
