"""What runs the operators: ``reference`` on any device, ``cute`` on NVIDIA GPUs."""
