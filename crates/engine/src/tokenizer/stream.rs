//! Text as it comes, token by token.

use super::{Tokenizer, TokenizerError};

/// Turns one sequence's tokens into text as they come.
///
/// A piece never ends inside a character: bytes of an unfinished one wait for the rest. All pieces and [`Self::finish`] together are
/// what [`Tokenizer::decode`] makes of all tokens.
#[derive(Debug, Clone, Default)]
pub struct Detokenizer {
    skip_special_tokens: bool,
    /// Byte-level tokenizers: bytes of a character that is not whole yet, at most three.
    pending: Vec<u8>,
    /// Others: tokens since the last but one place where the text was whole, so that the decoder sees what came before.
    window: Vec<u32>,
    /// Tokens of the window up to the last place where the text was whole.
    whole: usize,
    /// Bytes of the window's text that were given out.
    given: usize,
}

impl Detokenizer {
    /// For a new sequence. Special tokens are left out with `skip_special_tokens`.
    #[must_use]
    pub fn new(skip_special_tokens: bool) -> Self {
        Self {
            skip_special_tokens,
            ..Self::default()
        }
    }

    /// Takes a token and returns the text that it completes, which may be empty.
    ///
    /// # Errors
    /// When the tokenizer refuses the ids (byte-level ones never do).
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String, TokenizerError> {
        if self.skip_special_tokens && tokenizer.is_special(id) {
            return Ok(String::new());
        }
        match &tokenizer.bytes {
            Some(bytes) => {
                self.pending
                    .extend_from_slice(bytes.get(id).unwrap_or_default());
                Ok(take_whole(&mut self.pending))
            }
            None => self.push_window(tokenizer, id),
        }
    }

    /// What is left when no more tokens come: an unfinished character becomes U+FFFD.
    ///
    /// # Errors
    /// When the tokenizer refuses the ids (byte-level ones never do).
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String, TokenizerError> {
        let mut rest = String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned();
        if !self.window.is_empty() {
            let text = tokenizer.decode(&self.window, self.skip_special_tokens)?;
            rest.push_str(text.get(self.given..).unwrap_or_default());
            self.window.clear();
        }
        (self.whole, self.given) = (0, 0);
        Ok(rest)
    }

    /// A trailing U+FFFD may be the beginning of a character: it waits. All text before it is certain.
    fn push_window(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String, TokenizerError> {
        self.window.push(id);
        let text = tokenizer.decode(&self.window, self.skip_special_tokens)?;
        let certain = text
            .strip_suffix(char::REPLACEMENT_CHARACTER)
            .unwrap_or(&text);
        let piece = certain.get(self.given..).unwrap_or_default().to_owned();
        self.given = self.given.max(certain.len());
        if certain.len() == text.len() {
            self.window.drain(..self.whole);
            self.whole = self.window.len();
            self.given = tokenizer
                .decode(&self.window, self.skip_special_tokens)?
                .len();
        }
        Ok(piece)
    }
}

/// Takes from `bytes` all but an unfinished character at the end.
fn take_whole(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut rest = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        rest += chunk.valid().len();
        let invalid = chunk.invalid();
        // The last chunk's invalid bytes may be the beginning of a character; anywhere else they are wrong for good.
        if rest + invalid.len() < bytes.len() || (!invalid.is_empty() && !may_be_finished(invalid))
        {
            text.push(char::REPLACEMENT_CHARACTER);
            rest += invalid.len();
        } else {
            break;
        }
    }
    bytes.drain(..rest);
    text
}

/// Whether more bytes could make a character of these, which are a maximal invalid part.
fn may_be_finished(bytes: &[u8]) -> bool {
    // `from_utf8` says so by an error without a length: unexpected end of input.
    std::str::from_utf8(bytes)
        .is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
}
