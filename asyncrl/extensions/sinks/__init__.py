"""Metrics in TensorBoard, Weights & Biases and MLflow."""
