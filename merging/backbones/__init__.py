"""The built-in backbones: name -> where its class is. The last one takes what the others do not."""

BUILTIN = {
    "clip_vision": "merging.backbones.clip_vision:ClipVision",
    "vit": "merging.backbones.vit:ViT",
    "open_clip": "merging.backbones.open_clip:OpenClip",
    "t5": "merging.backbones.t5:T5",
    "llama": "merging.backbones.llama:Llama",
    "transformers": "merging.backbones.transformers:AnyTransformers",
}
