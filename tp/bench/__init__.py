"""Measures a model beside other programs, in turns: each contender is a process of its own."""
