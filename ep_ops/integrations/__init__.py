"""Other libraries' models and trainers with ep_ops inside. Each module imports the library that it is named after."""
