"""Everything of `brorl plan --cluster`: hardware, model shape, unit costs, capacity, memory, simulation, tables."""
