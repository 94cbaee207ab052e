//! Text to tokens, tokens to bytes, and a chat to a prompt.

use thiserror::Error;

/// One message of a chat.
///
/// ```
/// use millpond_node::model::ChatMessage;
/// assert_eq!(ChatMessage { role: "user", content: "hi" }.role, "user");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChatMessage<'a> {
    /// `system`, `user` or `assistant`; others are passed on as they are.
    pub role: &'a str,
    /// What was said.
    pub content: &'a str,
}

/// Why text cannot become tokens.
///
/// ```
/// use millpond_node::model::TokenizerError;
/// assert!(TokenizerError::EmptyChat.to_string().contains("at least one message"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The tokenizer refused.
    #[error("the text cannot be tokenized: {0}; send plain text")]
    Refused(String),
    /// A chat has no messages.
    #[error("a chat needs at least one message")]
    EmptyChat,
}

/// A model's tokenizer. Text from users never becomes a control token.
///
/// ```
/// use millpond_node::model::{tokenizer::Bytes, Tokenizer};
/// let tokens = Bytes.encode("né").unwrap();
/// let bytes: Vec<u8> = tokens.iter().flat_map(|token| Bytes.bytes_of(*token)).copied().collect();
/// assert_eq!(bytes, "né".as_bytes());
/// ```
pub trait Tokenizer: Send + Sync {
    /// The tokens of `text`.
    ///
    /// # Errors
    /// Text that cannot be tokenized.
    fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError>;

    /// The bytes of one token: a character may be spread over several tokens. Control tokens have none.
    fn bytes_of(&self, token: u32) -> &[u8];

    /// The prompt that makes the model answer `messages`, by the model's chat template.
    ///
    /// # Errors
    /// An empty chat, or text that cannot be tokenized.
    fn chat(&self, messages: &[ChatMessage<'_>]) -> Result<Vec<u32>, TokenizerError>;
}

/// Control tokens of the ChatML template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChatMl<'a> {
    pub(super) start: u32,
    pub(super) end: u32,
    /// What the system says where no message does; `None`: nothing.
    pub(super) system: Option<&'a str>,
}

impl ChatMl<'_> {
    /// `<start>role\ncontent<end>\n` for each message, then `<start>assistant\n`.
    pub(super) fn prompt(
        &self,
        tokenizer: &dyn Tokenizer,
        messages: &[ChatMessage<'_>],
    ) -> Result<Vec<u32>, TokenizerError> {
        let first = messages.first().ok_or(TokenizerError::EmptyChat)?;
        let system = self.system.filter(|_| first.role != "system");
        let system = system.map(|content| ChatMessage { role: "system", content });
        let mut tokens = Vec::new();
        for ChatMessage { role, content } in system.iter().chain(messages) {
            tokens.push(self.start);
            tokens.extend(tokenizer.encode(&format!("{role}\n{content}"))?);
            tokens.push(self.end);
            tokens.extend(tokenizer.encode("\n")?);
        }
        tokens.push(self.start);
        tokens.extend(tokenizer.encode("assistant\n")?);
        Ok(tokens)
    }
}

/// A byte is a token; 256 and 257 start and end a message, 258 ends the text.
///
/// ```
/// use millpond_node::model::{tokenizer::Bytes, Tokenizer};
/// assert!(Bytes.bytes_of(Bytes::END_OF_TEXT).is_empty());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes;

impl Bytes {
    /// Starts a message of a chat.
    pub const START: u32 = 256;
    /// Ends a message of a chat.
    pub const END: u32 = 257;
    /// Ends the text.
    pub const END_OF_TEXT: u32 = 258;
}

static ALL_BYTES: [u8; 256] = {
    let mut bytes = [0u8; 256];
    let mut value = 0u8;
    loop {
        bytes[value as usize] = value;
        if value == u8::MAX {
            break bytes;
        }
        value += 1;
    }
};

impl Tokenizer for Bytes {
    fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        Ok(text.bytes().map(u32::from).collect())
    }

    fn bytes_of(&self, token: u32) -> &[u8] {
        ALL_BYTES.get(token as usize).map_or(&[], std::slice::from_ref)
    }

    fn chat(&self, messages: &[ChatMessage<'_>]) -> Result<Vec<u32>, TokenizerError> {
        ChatMl { start: Self::START, end: Self::END, system: None }.prompt(self, messages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chat_ends_with_the_assistants_turn_and_names_the_system_once() {
        let template = ChatMl { start: Bytes::START, end: Bytes::END, system: Some("be kind") };
        let text = |messages: &[ChatMessage<'_>]| {
            let tokens = template.prompt(&Bytes, messages).unwrap();
            let shown = tokens.iter().map(|token| match *token {
                Bytes::START => "<".to_owned(),
                Bytes::END => ">".to_owned(),
                byte => char::from_u32(byte).unwrap().to_string(),
            });
            shown.collect::<String>()
        };
        let user = ChatMessage { role: "user", content: "hi" };
        let system = ChatMessage { role: "system", content: "be brief" };
        assert_eq!(text(&[user]), "<system\nbe kind>\n<user\nhi>\n<assistant\n");
        assert_eq!(text(&[system, user]), "<system\nbe brief>\n<user\nhi>\n<assistant\n");
        assert_eq!(template.prompt(&Bytes, &[]), Err(TokenizerError::EmptyChat));
    }
}
