"""kvexp's eviction for `model.generate(custom_generate=FOLDER)` of transformers: a folder made of our modules."""
