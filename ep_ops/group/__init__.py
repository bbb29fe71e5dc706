"""The ranks of a communicator: topology, exchange of host values, departure and survivors."""
