"""What a training will take, told by the compiler before it is paid for."""
