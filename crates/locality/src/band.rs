//! Which clusters are near enough.

/// How far below the best similarity a cluster may be and still be near enough.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Band {
    /// Width: 0 is pure locality, 1 lets every cluster in (for signatures without negative cells).
    pub tau: f32,
    /// When the band has one member and `tau > 0`, let the second nearest in too, as the authors'
    /// released code does. The paper's text does not.
    pub widen_single: bool,
}

impl Default for Band {
    /// The paper's: tau 0.1, not widened.
    fn default() -> Self {
        Self {
            tau: 0.1,
            widen_single: false,
        }
    }
}

impl Band {
    /// Writes `{ k : s_k >= max s - tau }` into `members`, ascending (ELDR, "route").
    ///
    /// A similarity of negative infinity or NaN keeps a cluster out, also from the maximum: so a
    /// caller marks a worker that must not be chosen. All out: no members.
    pub fn members(&self, similarities: &[f32], members: &mut Vec<usize>) {
        members.clear();
        let able = |s: &f32| *s > f32::NEG_INFINITY;
        let best = similarities
            .iter()
            .copied()
            .filter(able)
            .fold(f32::NEG_INFINITY, f32::max);
        if best == f32::NEG_INFINITY {
            return;
        }
        let floor = best - self.tau.max(0.0);
        members.extend(
            (0..similarities.len()).filter(|&k| able(&similarities[k]) && similarities[k] >= floor),
        );
        if let (true, &[only]) = (self.widen_single && self.tau > 0.0, members.as_slice()) {
            let second = (0..similarities.len())
                .filter(|&k| k != only && able(&similarities[k]))
                // max_by would take the last of equals.
                .min_by(|&a, &b| similarities[b].total_cmp(&similarities[a]).then(a.cmp(&b)));
            members.extend(second);
            members.sort_unstable();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(tau: f32, widen_single: bool, similarities: &[f32], expected: &[usize]) {
        let mut members = vec![9];
        Band { tau, widen_single }.members(similarities, &mut members);
        assert_eq!(members, expected, "tau {tau} of {similarities:?}");
    }

    #[test]
    fn members_follow_the_rule() {
        check(0.1, false, &[0.9, 0.85, 0.5], &[0, 1]);
        check(0.0, false, &[0.9, 0.85, 0.9], &[0, 2]);
        check(1.0, false, &[0.9, 0.0, 0.5], &[0, 1, 2]);
        check(0.25, false, &[0.75, 0.5], &[0, 1]);
        check(0.1, false, &[0.0, 0.0], &[0, 1]);
        check(0.1, false, &[-0.5, -0.55, -0.9], &[0, 1]);
        check(-1.0, false, &[0.5, 0.4], &[0]);
        check(0.1, false, &[], &[]);
    }

    #[test]
    fn a_single_member_is_widened_on_request() {
        check(0.1, true, &[0.2, 0.9, 0.5, 0.5], &[1, 2]);
        check(0.1, true, &[0.2, 0.9, 0.85], &[1, 2]);
        check(0.0, true, &[0.2, 0.9], &[1]);
        check(0.1, true, &[0.9], &[0]);
        check(0.1, true, &[f32::NEG_INFINITY, 0.9], &[1]);
    }

    #[test]
    fn marked_clusters_stay_out() {
        check(1.0, false, &[f32::NEG_INFINITY, 0.2, f32::NAN], &[1]);
        check(1.0, true, &[f32::NEG_INFINITY, f32::NAN], &[]);
        check(
            f32::INFINITY,
            false,
            &[0.1, -1.0, f32::NEG_INFINITY],
            &[0, 1],
        );
    }
}
