"""FACTS → PRE-ROPE KV."""

from inferscale.config import EncodeConfig
from inferscale.core import ChunkKV
from inferscale.decoder.base import LayerwiseDecoder
from inferscale.encode.base import ENCODER_VERSION, Encoded, EncodeJob, Encoder
from inferscale.encode.exact import ExactEncoder
from inferscale.encode.header import HeaderCache, encode_header
from inferscale.encode.streaming import StreamingEncoder

__all__ = ["ENCODER_VERSION", "EncodeJob", "Encoded", "Encoder", "HeaderCache", "create_encoder", "encode_header"]


def create_encoder(decoder: LayerwiseDecoder, header: ChunkKV, config: EncodeConfig) -> Encoder:
    """The encoder that `config.mode` names."""
    kind = ExactEncoder if config.mode == "exact" else StreamingEncoder
    return kind(decoder, header, window=config.window, batch_tokens=config.batch_tokens)
