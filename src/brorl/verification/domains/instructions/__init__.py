"""The checks of the 25 kinds of instructions of IFEval, one function per kind."""
