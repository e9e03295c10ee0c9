"""Implementations of scaled dot-product attention: the contract in ``base``, one file each, one table in ``registry``."""
