"""The built-in backbones: name -> where its class is. The last one takes what the others do not."""

BUILTIN = {
    "clip_vision": "merging.backbones.clip_vision:ClipVision",
    "vit": "merging.backbones.vit:ViT",
    "transformers": "merging.backbones.transformers:AnyTransformers",
}
