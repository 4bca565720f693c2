"""The independent choices that an algorithm is made of, one package per axis."""
