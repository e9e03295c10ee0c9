"""Exact transformations of the inputs: the contract in ``base``, one file each, one table in ``registry``."""
