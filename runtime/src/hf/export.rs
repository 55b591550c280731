//! How is a Hugging Face directory written?
