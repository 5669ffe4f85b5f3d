from unsloth_pack.models.spec import ArchSpec

SPEC = ArchSpec("llama", tiny=dict(rope_parameters=dict(rope_type="default", rope_theta=5e5)))
