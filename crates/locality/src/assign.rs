//! Points to clusters of bounded size at the least total cost, exactly.
//!
//! This is the transportation problem whose demands are single points. The Hungarian method on
//! `N x N` slots would solve it in `O(N^3)`; but a cluster's slots are all alike, so shortest
//! augmenting paths only ever run between clusters. A point that finds its nearest cluster full
//! pushes a chain of members onwards, each to where moving costs least, until some cluster has room:
//! a Dijkstra search over `K` nodes with prices that keep all edges non-negative. Costs
//! `O(N K)` when there is room everywhere and `O(N K^2)` when there is not, plus the upkeep of the
//! cheapest move between each two clusters.

use thiserror::Error;

/// How many points a cluster takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// At least so many.
    pub at_least: usize,
    /// At most so many.
    pub at_most: usize,
}

/// An assignment that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AssignError {
    /// The costs are not a whole number of rows.
    #[error("expected whole rows of {clusters} costs, got {costs} costs")]
    Shape {
        /// Clusters there are.
        clusters: usize,
        /// Costs that came.
        costs: usize,
    },
    /// No assignment keeps to the sizes.
    #[error(
        "expected clusters that hold {points} points together, got {clusters} of {at_least} to {at_most}"
    )]
    Infeasible {
        /// Points to place.
        points: usize,
        /// Clusters there are.
        clusters: usize,
        /// The least size of each.
        at_least: usize,
        /// The largest size of each.
        at_most: usize,
    },
    /// A cost so large that sums of them might overflow.
    #[error("expected costs of at most 2^48 in size, got {0}")]
    Cost(i64),
}

/// Assigns every point to a cluster: the cluster of each point, such that all cluster sizes are
/// within `capacity` and the sum of `costs[point, cluster]` is the least possible.
///
/// `costs` is `points x clusters`, row-major; integers, so that "least" has no rounding in it. Equal
/// costs are resolved the same way every time.
///
/// # Errors
/// See [`AssignError`].
pub fn assign(costs: &[i64], clusters: usize, capacity: Capacity) -> Result<Vec<u32>, AssignError> {
    let whole = clusters > 0 && costs.len().is_multiple_of(clusters);
    if !whole && !costs.is_empty() {
        return Err(AssignError::Shape {
            clusters,
            costs: costs.len(),
        });
    }
    let points = costs.len().checked_div(clusters).unwrap_or(0);
    let Capacity { at_least, at_most } = capacity;
    if at_least > at_most
        || clusters.saturating_mul(at_least) > points
        || clusters.saturating_mul(at_most) < points
    {
        return Err(AssignError::Infeasible {
            points,
            clusters,
            at_least,
            at_most,
        });
    }
    if let Some(&cost) = costs.iter().find(|cost| cost.unsigned_abs() > 1 << 48) {
        return Err(AssignError::Cost(cost));
    }
    let mut solver = Solver::new(costs, clusters);
    let forced = clusters * at_least;
    for point in 0..forced {
        solver.insert(point, at_least);
    }
    // Every cluster now has its least and room for more: what it costs to be the fuller one starts
    // at nothing for the dearest, and below for those that were given points they attract less.
    let dearest = solver.prices.iter().copied().max().unwrap_or(0);
    for price in &mut solver.prices {
        *price -= dearest;
    }
    for point in forced..points {
        solver.insert(point, at_most);
    }
    Ok(solver.labels)
}

/// Assigns each row of a square matrix to a column of its own such that the sum of similarities is
/// the largest possible: which new cluster continues which old one.
///
/// # Errors
/// [`AssignError::Shape`] when the matrix is not `clusters x clusters`.
pub fn match_rows(similarities: &[f32], clusters: usize) -> Result<Vec<u32>, AssignError> {
    if similarities.len() != clusters * clusters {
        return Err(AssignError::Shape {
            clusters,
            costs: similarities.len(),
        });
    }
    let costs: Vec<i64> = similarities.iter().map(|&s| distance_cost(s)).collect();
    let one = Capacity {
        at_least: 1,
        at_most: 1,
    };
    assign(&costs, clusters, one)
}

/// A cosine distance as an integer cost, in steps of 2^-32.
pub(crate) fn distance_cost(similarity: f32) -> i64 {
    ((1.0 - f64::from(similarity)) * f64::from(1u32 << 31) * 2.0).round() as i64
}

/// The cheapest way to send a member of one cluster to another: the difference in cost, and who.
type Move = (i64, u32);

const NOBODY: Move = (i64::MAX, u32::MAX);

/// A partial assignment that is optimal for the points placed so far.
///
/// Invariant (complementary slackness): for every member `i` of `a` and every `b`,
/// `cost[i,a] + price[a] <= cost[i,b] + price[b]`; a full cluster's price is at least 0, one with
/// room and more than its least at 0, one at its least at most 0.
struct Solver<'a> {
    costs: &'a [i64],
    clusters: usize,
    labels: Vec<u32>,
    members: Vec<Vec<u32>>,
    prices: Vec<i64>,
    /// `clusters x clusters`.
    moves: Vec<Move>,
    // Of the search, kept to be used again.
    reach: Vec<i64>,
    parent: Vec<u32>,
    settled: Vec<bool>,
}

const SOURCE: u32 = u32::MAX;

impl<'a> Solver<'a> {
    fn new(costs: &'a [i64], clusters: usize) -> Self {
        Self {
            costs,
            clusters,
            labels: vec![u32::MAX; costs.len().checked_div(clusters).unwrap_or(0)],
            members: vec![Vec::new(); clusters],
            prices: vec![0; clusters],
            moves: vec![NOBODY; clusters * clusters],
            reach: vec![0; clusters],
            parent: vec![SOURCE; clusters],
            settled: vec![false; clusters],
        }
    }

    fn cost(&self, point: u32, cluster: usize) -> i64 {
        self.costs[point as usize * self.clusters + cluster]
    }

    /// Places one more point, with room for `limit` points per cluster.
    fn insert(&mut self, point: usize, limit: usize) {
        let point = point as u32;
        for k in 0..self.clusters {
            self.reach[k] = self.cost(point, k) + self.prices[k];
        }
        self.parent.fill(SOURCE);
        self.settled.fill(false);
        let (mut shortest, mut target) = (i64::MAX, 0);
        loop {
            let nearest = (0..self.clusters)
                .filter(|&k| !self.settled[k])
                .min_by_key(|&k| (self.reach[k], k));
            let Some(from) = nearest.filter(|&k| self.reach[k] < shortest) else {
                break;
            };
            self.settled[from] = true;
            if self.members[from].len() < limit {
                // Below its least a cluster is cheap to enter: its price is negative, the last
                // step, out to where points leave the network, pays that back.
                let end = self.reach[from] - self.prices[from];
                if end < shortest {
                    (shortest, target) = (end, from);
                }
            }
            self.relax(from);
        }
        for k in 0..self.clusters {
            if self.settled[k] {
                self.prices[k] += (shortest - self.reach[k]).max(0);
            }
        }
        self.augment(point, target);
    }

    fn relax(&mut self, from: usize) {
        let row = &self.moves[from * self.clusters..(from + 1) * self.clusters];
        let base = self.reach[from] - self.prices[from];
        for (to, &(difference, _)) in row.iter().enumerate() {
            if difference == i64::MAX || self.settled[to] {
                continue;
            }
            let reach = base + difference + self.prices[to];
            if reach < self.reach[to] {
                self.reach[to] = reach;
                self.parent[to] = from as u32;
            }
        }
    }

    /// Shifts one member along each step of the path that ends in `target`.
    fn augment(&mut self, point: u32, target: usize) {
        let mut shifts = Vec::new();
        let mut to = target;
        while self.parent[to] != SOURCE {
            let from = self.parent[to] as usize;
            shifts.push((self.moves[from * self.clusters + to].1, from, to));
            to = from;
        }
        for (member, from, to) in shifts {
            self.remove(member, from);
            self.add(member, to);
        }
        self.add(point, to);
    }

    fn add(&mut self, point: u32, cluster: usize) {
        self.labels[point as usize] = cluster as u32;
        self.members[cluster].push(point);
        let here = self.cost(point, cluster);
        for to in 0..self.clusters {
            let step = (self.cost(point, to) - here, point);
            let best = &mut self.moves[cluster * self.clusters + to];
            if to != cluster && step < *best {
                *best = step;
            }
        }
    }

    fn remove(&mut self, point: u32, cluster: usize) {
        self.members[cluster].retain(|&member| member != point);
        for to in 0..self.clusters {
            let at = cluster * self.clusters + to;
            if self.moves[at].1 == point {
                self.moves[at] = self.members[cluster]
                    .iter()
                    .map(|&member| (self.cost(member, to) - self.cost(member, cluster), member))
                    .min()
                    .unwrap_or(NOBODY);
            }
        }
    }
}
