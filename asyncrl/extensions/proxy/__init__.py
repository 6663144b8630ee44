"""OpenAI-compatible proxy in front of `generate`, which trains agents that do not use asyncrl's API.

server.py       HTTP: API keys, request bodies, disconnected clients, errors
session.py      one episode: its chats, texts and rewards, and the trajectory that they form
histories.py    which chat a request continues, and its exact tokens
messages.py     canonical form in which messages are compared and rendered; error responses
fields.py       request fields, of which those that would corrupt training are refused
answers.py      responses in the OpenAI format
responses_api.py, messages_api.py   OpenAI's responses and Anthropic's messages, in the form of chats
parsing.py      tool calls in an answer, and how one is forced
rewards.py      rewards posted by the programs
"""
