"""PPO's critic, for generalized advantage estimates."""
