"""Environments of prime's verifiers as tasks: task=verifiers. They run in a virtual environment of their own.

extension.py    what this folder adds to a run
task.py         questions and episodes of one environment, and which of their rewards are accepted
process.py      the worker process as asyncrl sees it
worker.py       the worker process, which runs in the virtual environment and imports nothing of asyncrl
envs.py         asyncrl-envs: makes the virtual environments
harness/        a chat loop with tools, in the worker, for environments that name no harness
"""
