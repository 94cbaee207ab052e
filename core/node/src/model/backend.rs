//! Which model, by name or file.

use std::path::PathBuf;
use std::sync::Arc;

use thiserror::Error;

use super::{Card, Model, toy};

/// Where a model comes from.
///
/// ```
/// use millpond_node::model::Source;
/// assert_eq!(Source::parse("toy"), Source::Toy);
/// assert_eq!(Source::parse("toy").load(1).unwrap().card().id, "toy");
/// assert!(Source::parse("./weights.gguf").card().is_err()); // says that the file is missing, and what fetches it
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// The one that is built in.
    Toy,
    /// A GGUF file.
    File(PathBuf),
}

/// Why a model cannot be loaded.
///
/// ```
/// use millpond_node::model::LoadError;
/// let error = LoadError::Missing { path: "a.gguf".into(), script: "fetch.sh" };
/// assert!(error.to_string().contains("use the model `toy`"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file is not there.
    #[error("there is no model in {}; fetch the default one with {script}, or use the model `toy`", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// What fetches the default model.
        script: &'static str,
    },
    /// The file cannot be read or is no GGUF.
    #[error("{} cannot be read ({reason}); give a GGUF file", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        reason: String,
    },
    /// The file holds something else than a llama that this build can run.
    #[error("{} cannot be served: {reason}; use a llama in GGUF with a ChatML vocabulary", path.display())]
    Unsuitable {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        reason: String,
    },
    /// This build has no such model.
    #[error("this build reads no model files; build it with the feature `llama`, or use the model `toy`")]
    NotBuilt,
}

impl Source {
    /// `toy`, or the path of a file.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        if text == toy::ID { Self::Toy } else { Self::File(text.into()) }
    }

    /// The default model's file if it is there, else the toy.
    #[must_use]
    pub fn preferred() -> Self {
        #[cfg(feature = "llama")]
        if super::llama::default_path().is_file() {
            return Self::File(super::llama::default_path());
        }
        Self::Toy
    }

    /// What is known about it without its weights.
    ///
    /// # Errors
    /// The file is missing or unsuitable.
    pub fn card(&self) -> Result<Card, LoadError> {
        match self {
            Self::Toy => Ok(toy::card()),
            #[cfg(feature = "llama")]
            Self::File(path) => super::llama::card(path),
            #[cfg(not(feature = "llama"))]
            Self::File(_) => Err(LoadError::NotBuilt),
        }
    }

    /// The model, ready to compute on `threads` threads (the toy uses the caller's).
    ///
    /// # Errors
    /// The file is missing or unsuitable.
    pub fn load(&self, threads: usize) -> Result<Arc<dyn Model>, LoadError> {
        match self {
            Self::Toy => Ok(Arc::new(toy::Toy::new())),
            #[cfg(feature = "llama")]
            Self::File(path) => Ok(Arc::new(super::llama::Llama::load(path, threads)?)),
            #[cfg(not(feature = "llama"))]
            Self::File(_) => {
                let _ = threads;
                Err(LoadError::NotBuilt)
            }
        }
    }
}
