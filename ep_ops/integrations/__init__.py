"""Integrations into models and trainers of other libraries. Each module imports the library that it is named after."""
