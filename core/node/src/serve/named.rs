//! A model under the name that the configuration gives it.

use std::sync::Arc;

use crate::config;
use crate::model::{Card, Model, ModelError, Piece};

/// The same weights and the same blocks, another name in requests.
pub(super) struct Named {
    card: Card,
    model: Arc<dyn Model>,
}

impl Named {
    /// `card` with the name that `section` gives, if it gives one.
    pub(super) fn card(section: &config::Model, card: Card) -> Card {
        if section.name.is_empty() { card } else { Card { id: section.name.clone(), ..card } }
    }

    /// `model` with the name that `section` gives, if it gives one.
    pub(super) fn model(section: &config::Model, model: Arc<dyn Model>) -> Arc<dyn Model> {
        if section.name.is_empty() {
            return model;
        }
        Arc::new(Self { card: Self::card(section, model.card().clone()), model })
    }
}

impl Model for Named {
    fn card(&self) -> &Card {
        &self.card
    }

    fn forward(&self, pieces: &mut [Piece<'_>]) -> Result<(), ModelError> {
        self.model.forward(pieces)
    }
}
