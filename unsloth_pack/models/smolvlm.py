from dataclasses import replace

from unsloth_pack.models import idefics3

VISION = replace(idefics3.VISION, model_type="smolvlm")
