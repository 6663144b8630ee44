"""What not every run needs: each folder can be deleted. The core imports none of them."""
