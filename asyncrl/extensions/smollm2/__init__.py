"""The default model, SmolLM2-135M-Instruct, made from a package: model=smollm2-135m."""
