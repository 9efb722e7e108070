"""What devices/cuda.py is made of: the driver, launch plans, memory, the loop."""
