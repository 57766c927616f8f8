"""The simulator: the production actors on a virtual clock, with simulated devices, wires and processes, and faults."""
