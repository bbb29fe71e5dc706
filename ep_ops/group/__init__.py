"""The ranks of a communicator: topology, agreement, exchange of host values, departure and survivors."""
