//! The assignment solver against the Hungarian method of `pathfinding`, on slots.
#![allow(clippy::unwrap_used)]

use locality::{AssignError, Capacity, assign, match_rows};
use pathfinding::prelude::{Matrix, kuhn_munkres_min};
use proptest::prelude::*;

fn total(costs: &[i64], clusters: usize, labels: &[u32]) -> i64 {
    costs
        .chunks(clusters)
        .zip(labels)
        .map(|(row, &k)| row[k as usize])
        .sum()
}

/// The least total by an `N x (K * at_most)` assignment; slots below `at_least` are cheaper than
/// any path around them.
fn optimum(costs: &[i64], clusters: usize, capacity: Capacity) -> i64 {
    const MUST: i64 = 1 << 40;
    let rows = costs.chunks(clusters).map(|row| {
        row.iter()
            .flat_map(|&cost| {
                (0..capacity.at_most)
                    .map(move |slot| cost - if slot < capacity.at_least { MUST } else { 0 })
            })
            .collect::<Vec<_>>()
    });
    let matrix = Matrix::from_rows(rows).unwrap();
    kuhn_munkres_min(&matrix).0 + MUST * (clusters * capacity.at_least) as i64
}

fn sizes(labels: &[u32], clusters: usize) -> Vec<usize> {
    let mut sizes = vec![0; clusters];
    for &label in labels {
        sizes[label as usize] += 1;
    }
    sizes
}

/// Points, clusters, costs with many or few equal ones, and what the sizes may be.
fn problem() -> impl Strategy<Value = (Vec<i64>, usize, Capacity)> {
    (
        1usize..9,
        1usize..30,
        prop::sample::select(vec![2i64, 10, 1_000_000]),
        0usize..3,
    )
        .prop_flat_map(|(clusters, more, levels, slack)| {
            let points = clusters + more - 1;
            let capacity = Capacity {
                at_least: 0,
                at_most: points.div_ceil(clusters) + slack,
            };
            (
                prop::collection::vec(-levels..levels, points * clusters),
                Just(clusters),
                (0..=points / clusters).prop_map(move |at_least| Capacity {
                    at_least,
                    ..capacity
                }),
            )
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_total_is_the_least((costs, clusters, capacity) in problem()) {
        let labels = assign(&costs, clusters, capacity).unwrap();
        for size in sizes(&labels, clusters) {
            prop_assert!((capacity.at_least..=capacity.at_most).contains(&size));
        }
        prop_assert_eq!(total(&costs, clusters, &labels), optimum(&costs, clusters, capacity));
        prop_assert_eq!(assign(&costs, clusters, capacity).unwrap(), labels);
    }

    #[test]
    fn the_order_of_points_does_not_change_the_total(
        (costs, clusters, capacity) in problem(),
    ) {
        let labels = assign(&costs, clusters, capacity).unwrap();
        let reversed: Vec<i64> = costs.chunks(clusters).rev().flatten().copied().collect();
        let others = assign(&reversed, clusters, capacity).unwrap();
        prop_assert_eq!(total(&costs, clusters, &labels), total(&reversed, clusters, &others));
    }

    #[test]
    fn no_swap_and_no_other_feasible_assignment_is_cheaper(
        (costs, clusters, capacity) in problem(), seed in any::<u64>(),
    ) {
        let labels = assign(&costs, clusters, capacity).unwrap();
        let best = total(&costs, clusters, &labels);
        // Any shuffle of the labels keeps the sizes.
        let mut other = labels;
        let mut state = seed;
        for i in (1..other.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            other.swap(i, (state >> 33) as usize % (i + 1));
        }
        prop_assert!(best <= total(&costs, clusters, &other));
    }
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let capacity = |at_least, at_most| Capacity { at_least, at_most };
    for (costs, clusters, capacity) in [
        (vec![0; 6], 2, capacity(0, 1)),
        (vec![0; 6], 2, capacity(2, 3)),
        (vec![0; 6], 3, capacity(2, 1)),
    ] {
        let error = assign(&costs, clusters, capacity).unwrap_err();
        assert!(matches!(error, AssignError::Infeasible { .. }), "{error}");
    }
    let error = assign(&[0; 7], 2, capacity(0, 9)).unwrap_err();
    assert!(matches!(error, AssignError::Shape { .. }), "{error}");
    let error = assign(&[1 << 60], 1, capacity(0, 9)).unwrap_err();
    assert!(matches!(error, AssignError::Cost(_)), "{error}");
    assert_eq!(assign(&[], 3, capacity(0, 1)).unwrap(), [0u32; 0]);
}

#[test]
fn rows_continue_the_columns_they_resemble() {
    let similarities = [0.9, 0.8, 0.1, 0.95, 0.2, 0.3, 0.1, 0.2, 0.7];
    assert_eq!(match_rows(&similarities, 3).unwrap(), [1, 0, 2]);
    assert!(match_rows(&similarities, 2).is_err());
}

#[test]
fn two_hundred_and_fifty_six_clusters() {
    // A point's nearest cluster is taken by its twin half of the time: long chains.
    let (points, clusters) = (600usize, 256usize);
    let costs: Vec<i64> = (0..points * clusters)
        .map(|cell| {
            let (point, k) = (cell / clusters, cell % clusters);
            ((point * 7919 + k * 104_729 + point * k * 31) % 1_000_003) as i64
        })
        .collect();
    let capacity = Capacity {
        at_least: 1,
        at_most: 3,
    };
    let labels = assign(&costs, clusters, capacity).unwrap();
    assert!(
        sizes(&labels, clusters)
            .iter()
            .all(|size| (1..=3).contains(size))
    );
    let slots = optimum(&costs, clusters, capacity);
    assert_eq!(total(&costs, clusters, &labels), slots);
}
