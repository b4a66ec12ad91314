"""The types of a Hugging Face model and tokenizer, for annotations in layers that do not import transformers."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

Model = PreTrainedModel
Tokenizer = PreTrainedTokenizerBase
