//! Stop strings in a stream of text.

/// Looks for stop strings in text that comes in pieces. Text that may be the beginning of one is held back until it is clear.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<String>,
    include_match: bool,
    /// The end of the text so far that may be the beginning of a stop string.
    held: String,
    stopped: bool,
}

/// What a piece of text made certain.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StopOutput {
    /// Text that can be shown.
    pub text: String,
    /// The stop string that ended the text, by its place in the list.
    pub matched: Option<usize>,
}

impl StopMatcher {
    /// Looks for `stops`; empty strings match nothing. With `include_match` the stop string is shown too.
    #[must_use]
    pub fn new(stops: Vec<String>, include_match: bool) -> Self {
        Self {
            stops,
            include_match,
            held: String::new(),
            stopped: false,
        }
    }

    /// Takes the next piece of text. The match that ends first in the text wins; of those that end together, the one that
    /// begins first. After a match nothing more is shown.
    pub fn push(&mut self, piece: &str) -> StopOutput {
        if self.stopped {
            return StopOutput::default();
        }
        let known = self.held.len();
        self.held.push_str(piece);
        if let Some((start, end, index)) = self.earliest(known) {
            self.stopped = true;
            self.held
                .truncate(if self.include_match { end } else { start });
            return StopOutput {
                text: std::mem::take(&mut self.held),
                matched: Some(index),
            };
        }
        let keep = self.partial();
        let rest = self.held.split_off(self.held.len() - keep);
        StopOutput {
            text: std::mem::replace(&mut self.held, rest),
            matched: None,
        }
    }

    /// The text ends here: gives what was held back.
    pub fn finish(&mut self) -> String {
        self.stopped = true;
        std::mem::take(&mut self.held)
    }

    /// Start, end and index of the match that ends first, none of which ends in the first `known` bytes.
    fn earliest(&self, known: usize) -> Option<(usize, usize, usize)> {
        let mut best: Option<(usize, usize, usize)> = None;
        for (index, stop) in self.stops.iter().enumerate().filter(|(_, s)| !s.is_empty()) {
            // A match may begin in the text held back, but not so early that it would have ended there.
            let mut from = (known + 1).saturating_sub(stop.len());
            while !self.held.is_char_boundary(from) {
                from += 1;
            }
            if let Some(at) = self.held[from..].find(stop.as_str()) {
                let (start, end) = (from + at, from + at + stop.len());
                if best.is_none_or(|(s, e, _)| (end, start) < (e, s)) {
                    best = Some((start, end, index));
                }
            }
        }
        best
    }

    /// Bytes at the end of the text that may be the beginning of a stop string.
    fn partial(&self) -> usize {
        let text = self.held.as_bytes();
        let longest = |stop: &String| {
            (1..stop.len())
                .rev()
                .find(|&n| text.ends_with(&stop.as_bytes()[..n]))
                .unwrap_or(0)
        };
        // A stop string's bytes may match across a character boundary only where its own characters end: the text is valid, and so
        // is every prefix of it that ends where a suffix equal to whole characters begins.
        let mut keep = self.stops.iter().map(longest).max().unwrap_or(0);
        while !self.held.is_char_boundary(self.held.len() - keep) {
            keep += 1;
        }
        keep
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(stops: &[&str], include: bool, pieces: &[&str]) -> (Vec<String>, Option<usize>) {
        let mut matcher =
            StopMatcher::new(stops.iter().map(|s| (*s).to_owned()).collect(), include);
        let mut shown = Vec::new();
        for piece in pieces {
            let out = matcher.push(piece);
            shown.push(out.text);
            if out.matched.is_some() {
                return (shown, out.matched);
            }
        }
        shown.push(matcher.finish());
        (shown, None)
    }

    #[test]
    fn holds_back_what_may_become_a_stop() {
        let (shown, matched) = feed(&["END"], false, &["some E", "N", "D of it"]);
        assert_eq!(shown, ["some ", "", ""]);
        assert_eq!(matched, Some(0));
        let (shown, matched) = feed(&["END"], false, &["some E", "N", "T"]);
        assert_eq!(shown, ["some ", "", "ENT", ""]);
        assert_eq!(matched, None);
        let (shown, _) = feed(&["END"], false, &["some EN"]);
        assert_eq!(shown, ["some ", "EN"]);
    }

    #[test]
    fn can_show_the_stop_itself() {
        let (shown, matched) = feed(&["\n\n"], true, &["a\n", "\nb"]);
        assert_eq!(shown.concat(), "a\n\n");
        assert_eq!(matched, Some(0));
    }

    #[test]
    fn the_first_end_wins() {
        assert_eq!(
            feed(&["bcd", "c"], false, &["abcd"]),
            (vec!["ab".into()], Some(1))
        );
        assert_eq!(
            feed(&["c", "abc"], false, &["xabc"]),
            (vec!["x".into()], Some(1))
        );
        assert_eq!(feed(&["", "q"], false, &["xyz"]).1, None);
    }

    #[test]
    fn characters_are_never_cut() {
        let (shown, matched) = feed(&["é!", "日本"], false, &["caf", "é", "?", "日", "本"]);
        assert_eq!(shown.concat(), "café?");
        assert_eq!(matched, Some(1));
    }

    proptest::proptest! {
        #[test]
        fn pieces_give_what_the_whole_gives(
            text in "[abé]{0,24}",
            stops in proptest::collection::vec("[abé]{1,4}", 0..3),
            cuts in proptest::collection::vec(0usize..24, 0..6),
        ) {
            let whole = {
                let mut matcher = StopMatcher::new(stops.clone(), false);
                // One character at a time, against a plain search over ends.
                let mut expected = (text.clone(), None);
                'ends: for (at, c) in text.char_indices() {
                    let end = at + c.len_utf8();
                    let mut hits: Vec<_> = stops.iter().enumerate().filter(|(_, s)| text[..end].ends_with(s.as_str())).collect();
                    hits.sort_by_key(|(_, s)| std::cmp::Reverse(s.len()));
                    if let Some((_, s)) = hits.first() {
                        expected = (text[..end - s.len()].to_owned(), Some((*s).clone()));
                        break 'ends;
                    }
                }
                let out = matcher.push(&text);
                let shown = if out.matched.is_some() { out.text } else { out.text + &matcher.finish() };
                let got = (shown, out.matched.map(|i| stops[i].clone()));
                proptest::prop_assert_eq!(&got, &expected);
                got
            };
            let mut ends: Vec<usize> = cuts.into_iter().filter(|&c| c < text.len() && text.is_char_boundary(c)).collect();
            ends.sort_unstable();
            ends.push(text.len());
            let mut matcher = StopMatcher::new(stops.clone(), false);
            let (mut shown, mut matched, mut from) = (String::new(), None, 0);
            for end in ends {
                let out = matcher.push(&text[from..end]);
                shown += &out.text;
                matched = matched.or(out.matched.map(|i| stops[i].clone()));
                from = end;
            }
            shown += &matcher.finish();
            proptest::prop_assert_eq!((shown, matched), whole);
        }
    }
}
