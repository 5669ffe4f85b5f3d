import pytest
from chat_tokenizers import FAMILIES, tokenizer_of


@pytest.fixture(params=FAMILIES)
def family(request):
    """A chat format's name, and a tokenizer whose vocabulary has its tokens."""
    return request.param, tokenizer_of(request.param)
