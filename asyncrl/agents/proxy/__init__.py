"""The OpenAI API over `generate`: agents that know nothing of asyncrl are trained through it.

server.py       HTTP: keys, bodies, clients that go away, errors
session.py      one episode: its chats, its texts, its rewards; the trajectory that they make
histories.py    which chat a request goes on from, and its exact tokens
messages.py     the one form in which messages are compared and rendered
fields.py       what a request may ask for; what would spoil training is refused
answers.py      what clients read
"""
