from .audio import AudioClassification as AudioClassification
from .base import Task as Task
from .image import ImageClassification as ImageClassification
from .multimodal import MultimodalClassification as MultimodalClassification
from .text import LanguageModel as LanguageModel
from .text_classification import TextClassification as TextClassification
from .video import VideoClassification as VideoClassification
