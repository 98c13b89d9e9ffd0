from .audio import AudioClassification as AudioClassification
from .base import Task as Task
from .image import ImageClassification as ImageClassification
from .text import LanguageModel as LanguageModel
from .text_classification import TextClassification as TextClassification
