"""Operations in C++ for CPU devices, where they could be compiled."""
