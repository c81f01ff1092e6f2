"""The Transformer of *Attention Is All You Need*, exact, as a model of Hugging Face transformers."""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.pipelines import PIPELINE_REGISTRY

from .configuration_vaswani import VaswaniConfig
from .generation_vaswani import paper_generation_config
from .modeling_vaswani import VaswaniForConditionalGeneration, VaswaniModel, VaswaniPreTrainedModel
from .pipeline import TASK, VaswaniTranslationPipeline
from .presets import preset, preset_names
from .tokenization_vaswani import VaswaniTokenizer

__version__ = "0.1.0"

AutoConfig.register(VaswaniConfig.model_type, VaswaniConfig, exist_ok=True)
AutoModel.register(VaswaniConfig, VaswaniModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(VaswaniConfig, VaswaniForConditionalGeneration, exist_ok=True)
AutoTokenizer.register(VaswaniConfig, VaswaniTokenizer, exist_ok=True)
PIPELINE_REGISTRY.register_pipeline(TASK, VaswaniTranslationPipeline, AutoModelForSeq2SeqLM, type="text")

__all__ = [
    "VaswaniConfig",
    "VaswaniForConditionalGeneration",
    "VaswaniModel",
    "VaswaniPreTrainedModel",
    "VaswaniTokenizer",
    "paper_generation_config",
    "preset",
    "preset_names",
]
