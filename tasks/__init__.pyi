from .base import Task as Task
from .image import ImageClassification as ImageClassification
