"""`asyncrl-convert`: Hugging Face folders <-> Megatron checkpoint folders, tensor by tensor."""
