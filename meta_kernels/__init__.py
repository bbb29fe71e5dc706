"""What is known of every ``ep`` operator without a communicator: its arguments (arguments.py), the shapes and dtypes of
its results (fakes.py), and the formats of rows by name (formats.py)."""
