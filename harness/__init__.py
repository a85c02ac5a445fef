"""The parts of the driver `main.py`; each module's docstring says its purpose."""
