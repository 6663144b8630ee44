"""A frozen base in 4 or 8 bits below adapters (QLoRA): trainer.lora.base."""
