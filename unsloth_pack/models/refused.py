"""List the architectures whose packed rows leak whatever a call says; they are refused by name."""

_KDA = "its Kimi delta attention hands no boundaries of documents to its kernels"
_MAMBA_1 = "the selective scan of its Mamba layers takes no boundaries of documents"

LEAKING = {  # `config.model_type` of the text model -> why
    "bailing_hybrid": _KDA,
    "falcon_mamba": _MAMBA_1,
    "glm5_next_text": _KDA,
    "jamba": _MAMBA_1,
    "kimi_linear": _KDA,
    "mamba": _MAMBA_1,
    "minimax": "its lightning attention takes no boundaries of documents",
    "recurrent_gemma": "its recurrent units take no boundaries of documents",
    "rwkv": "its recurrence takes no boundaries of documents",
    "xlstm": "its memory cells take no boundaries of documents",
    "zamba": _MAMBA_1,
    "zaya": "its convolutions take no boundaries of documents",
}
