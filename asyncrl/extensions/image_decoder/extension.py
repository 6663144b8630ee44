"""What this folder adds: the decoder of images."""

from __future__ import annotations

from asyncrl import extension


class Decoding(extension.Extension):
    """Images of questions, agents and environments come out in the form that the model reads."""

    decoder = "asyncrl.extensions.image_decoder.decoder:DecodingProcesses"


Own = Decoding
