//! Prefill, then decode: the one path that every request takes, and what is done when either worker fails.
//!
//! 1. The prompt goes to a prefill worker as a request for one token; its reply carries transfer parameters and, under
//!    this project's key, expert counts. A worker that fails is followed by another, up to `prefill_attempts`.
//! 2. The decode policy chooses by those counts, and the decode worker gets the client's own request with the
//!    parameters. One that cannot be reached has not touched the blocks, so the next gets the same parameters. One that
//!    fails later, before its first byte, may have: the request is prefilled again, up to `prefills_again`.
//! 3. From the first byte on the reply is relayed, and a failure is an event in the stream.
//!
//! A worker that falls silent meanwhile has failed.
//!
//! Between the two, [`Held`] stands for the blocks that the prefill worker keeps: whatever path drops it unused gives them
//! back, also when the client leaves. A prefill runs in a task of its own, so that also a reply that is on its way when the
//! client leaves becomes [`Held`]. A prefill whose reply never came may have been answered all the same: an embedded worker is
//! told to forget it, by the name that it was given.

use std::sync::Arc;
use std::time::Instant;

use axum::response::Response;
use bytes::{Bytes, BytesMut};
use experts::PromptCounts;
use futures::StreamExt;
use http::HeaderMap;
use http::header::HeaderValue;
use protocol::handoff::{
    Extras, HANDOFF, HANDOFF_HEADER, KV_TRANSFER_PARAMS, Transport, decode_body, prefill_body,
};
use protocol::{ApiError, TransferParams};
use routing::DecodeReason;
use serde_json::{Map, Value};
use tokio_util::sync::CancellationToken;

use crate::account::Account;
use crate::call::Call;
use crate::errors::{no_worker, respond};
use crate::health;
use crate::registry::{InFlight, Kind, Side, Tried, Worker};
use crate::relay::{Observer, Opened, Pieces, Relay};
use crate::reply::{self, Trail};
use crate::server::App;
use crate::upstream::{Failure, Reply, is_event_stream, pieces, too_long, within_life};

/// Serves one request, whatever becomes of it.
pub(crate) async fn serve(app: &Arc<App>, call: &Call, mut account: Account) -> Response {
    match attempt(app, call).await {
        Ok(Outcome {
            trail,
            served: Served::Whole(reply),
        }) => reply::whole(app, &trail, reply, account),
        Ok(Outcome {
            trail,
            served: Served::ByPrefill(value),
        }) => {
            let stream = call.stream.then_some(call.wants_usage);
            reply::from_prefill(app, &trail, call.route, stream, value, account)
        }
        Ok(Outcome {
            trail,
            served: Served::Stream(opened),
        }) => reply::stream(app, &trail, Relay::new(app, account, *opened)),
        Err(error) => {
            account.close(error.status.as_u16());
            tracing::debug!(
                request_id = call.request_id,
                status = error.status.as_u16(),
                "refused: {error}"
            );
            respond(&error)
        }
    }
}

/// A request that was served, and by whom.
struct Outcome {
    trail: Trail,
    served: Served,
}

enum Served {
    /// A worker's whole reply.
    Whole(Reply),
    /// The prefill worker's own answer to a request that ended with its first token.
    ByPrefill(Value),
    /// A stream that has begun.
    Stream(Box<Opened>),
}

async fn attempt(app: &Arc<App>, call: &Call) -> Result<Outcome, ApiError> {
    let (mut tried_prefill, mut tried_decode) = (Tried::default(), Tried::default());
    let mut again = app.prefills_again;
    loop {
        let held = match prefill(app, call, &mut tried_prefill).await? {
            Prefilled::Answered(outcome) => return Ok(*outcome),
            Prefilled::Held(held) => held,
        };
        match decode(app, call, *held, &mut tried_decode).await {
            Ok(outcome) => return Ok(outcome),
            Err(Undecoded::PrefillAgain(error)) if again > 0 => {
                again -= 1;
                app.metrics.prefilled_again();
                tracing::info!(request_id = call.request_id, "prefilling again: {error}");
            }
            Err(Undecoded::PrefillAgain(error) | Undecoded::Final(error)) => return Err(error),
        }
    }
}

enum Prefilled {
    /// The request ended here: refused by the worker, or finished with its first token.
    Answered(Box<Outcome>),
    /// The prompt is computed, and its blocks wait.
    Held(Box<Held>),
}

/// A prompt's blocks on a prefill worker, until a decode worker has taken them. Dropped before that, they are given back.
struct Held {
    app: Arc<App>,
    worker: Arc<Worker>,
    params: TransferParams,
    headers: HeaderMap,
    counts: Option<PromptCounts>,
    /// Prompt tokens that the prefill worker counted.
    prompt_tokens: Option<u64>,
    since: Instant,
    taken: bool,
}

impl Drop for Held {
    fn drop(&mut self) {
        // vLLM has no route for it, and lets go when its lease ends.
        if self.taken || self.params.transport() != Transport::Embedded {
            return;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        self.app.metrics.released();
        let app = Arc::clone(&self.app);
        let worker = Arc::clone(&self.worker);
        let headers = std::mem::take(&mut self.headers);
        let params: Value = std::mem::take(&mut self.params).into();
        runtime.spawn(async move {
            give_back(&app, &worker, &headers, KV_TRANSFER_PARAMS, params).await;
        });
    }
}

/// Tells an embedded prefill worker to free blocks, which are named by a field of the request.
async fn give_back(app: &App, worker: &Worker, headers: &HeaderMap, field: &str, named: Value) {
    let body = Map::from_iter([(field.to_owned(), named)]);
    let body = Bytes::from(Value::Object(body).to_string());
    let limit = app.timeouts.probe;
    let given = app
        .upstream
        .post_whole(worker, "/colocate/release", headers, body, limit)
        .await;
    // The lease ends in any case.
    if let Err(failure) = given {
        tracing::debug!(
            worker = worker.name,
            "blocks not given back: {}",
            failure.to_api_error(worker)
        );
    }
}

async fn prefill(app: &Arc<App>, call: &Call, tried: &mut Tried) -> Result<Prefilled, ApiError> {
    let body = prefill_body(&call.body).to_bytes();
    let mut last: Option<ApiError> = None;
    for _ in 0..app.prefill_attempts.max(1) {
        let Some((guard, decision)) = app.placement.place_prefill(&call.prefix, tried) else {
            break;
        };
        tracing::debug!(
            request_id = call.request_id,
            worker = guard.name,
            reason = decision.reason.as_str(),
            "prefill placed"
        );
        let begun = Instant::now();
        let worker = Arc::clone(guard.worker());
        match prefill_on(app, call, guard, body.clone()).await {
            Ok(prefilled) => {
                app.metrics.prefill(begun.elapsed());
                return Ok(prefilled);
            }
            Err(failure) => last = Some(set_aside(app, &worker, &failure, tried)),
        }
    }
    Err(give_up(Side::Prefill, last))
}

/// One try at a prefill, in a task of its own. When the client leaves, a request that the worker has not begun to answer is
/// dropped, which ends it there; a reply that has begun is read to its end, so that what it names can be given back.
async fn prefill_on(
    app: &Arc<App>,
    call: &Call,
    guard: InFlight,
    body: Bytes,
) -> Result<Prefilled, Failure> {
    let left = CancellationToken::new();
    let leg = Leg {
        app: Arc::clone(app),
        guard,
        path: call.route.path(),
        headers: call.headers.clone(),
        left: left.clone(),
    };
    let _left = left.drop_guard();
    tokio::spawn(leg.run(body)).await.unwrap_or_else(|error| {
        Err(Failure::Transport(format!(
            "the prefill ended badly: {error}"
        )))
    })
}

/// A prefill on one worker.
struct Leg {
    app: Arc<App>,
    guard: InFlight,
    path: &'static str,
    headers: HeaderMap,
    /// The client has left.
    left: CancellationToken,
}

impl Leg {
    async fn run(self, body: Bytes) -> Result<Prefilled, Failure> {
        let name = uuid::Uuid::new_v4().to_string();
        match self.reply(&name, body).await {
            Ok(reply) => read_prefill(&self.app, self.headers, &self.guard, reply),
            Err(failure) => {
                // It may be answering, or have answered, and does not know that nobody listens.
                let in_doubt = !matches!(failure, Failure::Connect { .. } | Failure::BadReply(_));
                if in_doubt && self.guard.kind() == Some(Kind::Embedded) {
                    let (app, worker) = (self.app, Arc::clone(self.guard.worker()));
                    // Whoever waits for the failure need not wait for this.
                    tokio::spawn(async move {
                        give_back(&app, &worker, &self.headers, HANDOFF, name.into()).await;
                    });
                }
                Err(failure)
            }
        }
    }

    /// The worker's reply to a prefill of this name.
    async fn reply(&self, name: &str, body: Bytes) -> Result<Reply, Failure> {
        let mut headers = self.headers.clone();
        if let Ok(name) = HeaderValue::from_str(name) {
            headers.insert(HANDOFF_HEADER, name);
        }
        let upstream = &self.app.upstream;
        within_life(&self.guard, self.app.timeouts.prefill, async {
            let response = tokio::select! {
                biased;
                response = upstream.post(&self.guard, self.path, &headers, body) => response?,
                // Nobody hears it.
                () = self.left.cancelled() => {
                    return Err(Failure::Transport("the client left".to_owned()));
                }
            };
            upstream.whole(response).await
        })
        .await
    }
}

/// Makes sense of a prefill worker's reply.
fn read_prefill(
    app: &Arc<App>,
    headers: HeaderMap,
    guard: &InFlight,
    reply: Reply,
) -> Result<Prefilled, Failure> {
    let trail = Trail {
        prefill: Some(guard.base().to_owned()),
        ..Trail::default()
    };
    if reply.status.is_client_error() {
        let error = ApiError::from_reply(reply.status, &reply.body);
        if error.has_code(ApiError::KV_TRANSFER_INCOMPATIBLE) {
            // Not the client's fault: it sent no parameters. The worker may be one for decoding.
            return Err(Failure::BadReply(error.message));
        }
        return Ok(Prefilled::Answered(Box::new(Outcome {
            trail,
            served: Served::Whole(reply),
        })));
    }
    if !reply.status.is_success() {
        return Err(Failure::Status(ApiError::from_reply(
            reply.status,
            &reply.body,
        )));
    }
    let value: Value = serde_json::from_slice(&reply.body)
        .map_err(|error| Failure::BadReply(format!("its prefill reply is not JSON: {error}")))?;
    let finished = finished(&value);
    let Some(mut params) = TransferParams::of_reply(&value) else {
        if finished? {
            return Ok(Prefilled::Answered(Box::new(Outcome {
                trail,
                served: Served::ByPrefill(value),
            })));
        }
        return Err(Failure::BadReply(format!(
            "its prefill reply has no {KV_TRANSFER_PARAMS}: is it configured to hand prompts over?"
        )));
    };
    let counts = counts(app, guard, &mut params);
    let mut held = Held {
        app: Arc::clone(app),
        worker: Arc::clone(guard.worker()),
        params,
        headers,
        prompt_tokens: None,
        counts,
        since: Instant::now(),
        taken: false,
    };
    // From here on, dropping what is held gives it back, also if the prefill failed.
    held.prompt_tokens = agreed_tokens(&value, &held)?;
    if finished? {
        return Ok(Prefilled::Answered(Box::new(Outcome {
            trail,
            served: Served::ByPrefill(value),
        })));
    }
    Ok(Prefilled::Held(Box::new(held)))
}

/// Reasons to finish that make a prefill's single token a complete answer.
const COMPLETE: [&str; 4] = ["stop", "tool_calls", "content_filter", "function_call"];

/// Whether every choice of a prefill reply ended by itself, and not at its limit of one token.
///
/// # Errors
/// A choice that ended for a reason that is no end of an answer, such as vLLM's `abort` and `error`.
fn finished(reply: &Value) -> Result<bool, Failure> {
    let choices = reply.get("choices").and_then(Value::as_array);
    let mut all = choices.is_some_and(|choices| !choices.is_empty());
    for choice in choices.into_iter().flatten() {
        match choice.get("finish_reason").and_then(Value::as_str) {
            None | Some("length") => all = false,
            Some(reason) if COMPLETE.contains(&reason) => {}
            Some(reason) => {
                return Err(Failure::BadReply(format!(
                    "expected its prefill to finish with length or one of {}, got {reason}",
                    COMPLETE.join(", ")
                )));
            }
        }
    }
    Ok(all)
}

/// The number of prompt tokens that all parts of a prefill reply agree on; none where none says.
fn agreed_tokens(reply: &Value, held: &Held) -> Result<Option<u64>, Failure> {
    // What other transports mean by their fields is their own affair.
    let transferred = match held.params.transport() {
        Transport::Embedded => held.params.remote_num_tokens(),
        Transport::Vllm => None,
    };
    let counted = held.counts.as_ref().map(PromptCounts::prompt_tokens);
    let mut said = [
        ("its usage", prompt_tokens(reply)),
        ("its transfer parameters", transferred),
        ("its expert counts", counted.map(u64::from)),
    ]
    .into_iter()
    .filter_map(|(what, tokens)| Some((what, tokens?)));
    let Some((first, tokens)) = said.next() else {
        return Ok(None);
    };
    match said.find(|&(_, other)| other != tokens) {
        None => Ok(Some(tokens)),
        Some((what, other)) => Err(Failure::Contradiction(format!(
            "{first} says {tokens} prompt tokens and {what} {other}"
        ))),
    }
}

fn prompt_tokens(reply: &Value) -> Option<u64> {
    reply.get("usage")?.get("prompt_tokens")?.as_u64()
}

/// Takes the expert counts out of the parameters. What cannot be read is as good as missing.
fn counts(app: &App, worker: &Worker, params: &mut TransferParams) -> Option<PromptCounts> {
    let Some(extras) = params.take_extras() else {
        app.said_no_counts.call_once(|| {
            tracing::warn!(
                worker = worker.name,
                "a prefill worker sends no expert counts: decode workers are chosen by load"
            );
        });
        return None;
    };
    match Extras::read(&extras) {
        Ok(extras) => extras.prompt_counts,
        Err(error) => {
            worker.count_failure();
            app.metrics.failure(worker, "bad_counts");
            tracing::warn!(
                worker = worker.name,
                "expert counts cannot be read: {error}"
            );
            None
        }
    }
}

/// Says, once, that the map does not fit the model that is served: every request is placed by load then.
fn say_other_model(app: &App, held: &Held) {
    let (Some(map), Some(counts)) = (&app.map, &held.counts) else {
        return;
    };
    app.said_other_model.call_once(|| {
        tracing::warn!(
            worker = held.worker.name,
            "the locality map is for a model of {}, but a prefill worker counts {}: decode workers are chosen by load",
            map.shape,
            counts.shape()
        );
    });
}

enum Undecoded {
    /// The blocks may be gone, the request may not be lost.
    PrefillAgain(ApiError),
    Final(ApiError),
}

async fn decode(
    app: &Arc<App>,
    call: &Call,
    mut held: Held,
    tried: &mut Tried,
) -> Result<Outcome, Undecoded> {
    if let Some(error) = mismatch(app, &held) {
        return Err(Undecoded::Final(error));
    }
    let mut body = decode_body(&call.body, &held.params);
    if call.stream {
        // For the check against the prefill worker's. The client gets to see it only if it asked itself.
        body.ask_for_usage();
    }
    let body = body.to_bytes();
    let mut last: Option<ApiError> = None;
    loop {
        if held.since.elapsed() > app.lease {
            let error = last.unwrap_or_else(|| {
                ApiError::kv_transfer_failed(
                    "the lease on the prompt's KV blocks ran out before a decode worker took them",
                )
            });
            return Err(Undecoded::PrefillAgain(error));
        }
        let placed = app.placement.place_decode(
            &call.request_id,
            held.counts.as_ref(),
            call.domain.as_deref(),
            tried,
        );
        let Some((guard, decision)) = placed else {
            return Err(Undecoded::Final(give_up(Side::Decode, last)));
        };
        tracing::debug!(
            request_id = call.request_id,
            worker = guard.name,
            reason = decision.reason.as_str(),
            "decode placed"
        );
        if decision.reason == DecodeReason::CountsShape {
            say_other_model(app, &held);
        }
        let trail = Trail {
            prefill: Some(held.worker.base().to_owned()),
            decode: Some(guard.base().to_owned()),
            reason: Some(decision.reason.as_str()),
        };
        match begin(app, call, &guard, body.clone(), held.prompt_tokens).await {
            Ok(Begun::Refused(reply)) => {
                return Ok(Outcome {
                    trail,
                    served: Served::Whole(reply),
                });
            }
            Ok(Begun::Whole(reply)) => {
                app.metrics.handoff(held.since.elapsed());
                held.taken = true;
                return Ok(Outcome {
                    trail,
                    served: Served::Whole(reply),
                });
            }
            Ok(Begun::Stream {
                pieces,
                ahead,
                observer,
            }) => {
                app.metrics.handoff(held.since.elapsed());
                held.taken = true;
                let opened = Opened {
                    guard,
                    pieces,
                    ahead,
                    observer,
                };
                return Ok(Outcome {
                    trail,
                    served: Served::Stream(Box::new(opened)),
                });
            }
            Err(failure @ Failure::Connect { .. }) => {
                last = Some(set_aside(app, &guard, &failure, tried))
            }
            Err(failure @ Failure::TokensDiffer { .. }) => {
                held.taken = true;
                return Err(Undecoded::Final(set_aside(app, &guard, &failure, tried)));
            }
            Err(failure) => {
                return Err(Undecoded::PrefillAgain(set_aside(
                    app, &guard, &failure, tried,
                )));
            }
        }
    }
}

/// An error if the parameters are of workers of another kind than the decode pool's.
fn mismatch(app: &App, held: &Held) -> Option<ApiError> {
    let sent = match held.params.transport() {
        Transport::Embedded => Kind::Embedded,
        Transport::Vllm => Kind::Other,
    };
    let pool = health::kind_of(&app.placement.decode)?;
    (sent != pool).then(|| {
        ApiError::bad_upstream(format!(
            "prefill worker {} hands over by {}, the decode workers take over by {}: KV blocks do not move between the two",
            held.worker.name,
            sent.as_str(),
            pool.as_str()
        ))
    })
}

enum Begun {
    /// The worker refused the request, and said why.
    Refused(Reply),
    Whole(Reply),
    Stream {
        pieces: Pieces,
        ahead: Bytes,
        observer: Observer,
    },
}

/// Sends a request to its decode worker, and waits until there is something to pass on.
async fn begin(
    app: &Arc<App>,
    call: &Call,
    guard: &InFlight,
    body: Bytes,
    expected: Option<u64>,
) -> Result<Begun, Failure> {
    let limit = if call.stream {
        app.timeouts.first_byte
    } else {
        app.timeouts.whole
    };
    within_life(guard, limit, async {
        let response = app
            .upstream
            .post(guard, call.route.path(), &call.headers, body)
            .await?;
        if response.status().is_success() && is_event_stream(&response) {
            let observer = Observer::new(call.wants_usage, expected);
            return first_event(app, Box::pin(pieces(response)), observer).await;
        }
        let reply = app.upstream.whole(response).await?;
        if reply.status.is_success() {
            return checked(reply, expected).map(Begun::Whole);
        }
        let error = ApiError::from_reply(reply.status, &reply.body);
        if error.is_transfer_failure() || !reply.status.is_client_error() {
            return Err(Failure::Status(error));
        }
        if error.has_code(ApiError::KV_TRANSFER_INCOMPATIBLE) {
            // Not the client's fault: it sent no parameters.
            return Err(Failure::BadReply(error.message));
        }
        Ok(Begun::Refused(reply))
    })
    .await
}

/// Reads a stream up to its first event, so that an error there can still be mended.
async fn first_event(
    app: &App,
    mut pieces: Pieces,
    mut observer: Observer,
) -> Result<Begun, Failure> {
    let mut ahead = BytesMut::new();
    while observer.events == 0 {
        let Some(piece) = pieces.next().await.transpose()? else {
            return Err(Failure::Transport(
                "the stream ended before its first event".to_owned(),
            ));
        };
        observer.push(&piece, &mut ahead)?;
        if ahead.len() > app.max_reply_bytes {
            return Err(too_long(app.max_reply_bytes));
        }
    }
    match observer.error.take() {
        None => Ok(Begun::Stream {
            pieces,
            ahead: ahead.freeze(),
            observer,
        }),
        Some(error) => Err(Failure::Status(ApiError::from_event(&error))),
    }
}

/// A decode worker's whole reply, once both workers agree on the prompt.
fn checked(mut reply: Reply, expected: Option<u64>) -> Result<Reply, Failure> {
    let Ok(mut value) = serde_json::from_slice::<Value>(&reply.body) else {
        return Err(Failure::BadReply("its reply is not JSON".to_owned()));
    };
    if let (Some(prefill), Some(decode)) = (expected, prompt_tokens(&value))
        && prefill != decode
    {
        return Err(Failure::TokensDiffer { prefill, decode });
    }
    // Parameters are between the workers.
    if let Some(object) = value.as_object_mut()
        && object
            .get(KV_TRANSFER_PARAMS)
            .is_some_and(|params| !params.is_null())
    {
        object.shift_remove(KV_TRANSFER_PARAMS);
        reply.body = Bytes::from(value.to_string());
    }
    Ok(reply)
}

/// Takes note of a failure: in the books, on the worker, and in what the request has tried. What to tell the client if
/// nobody else serves it.
fn set_aside(app: &App, worker: &Worker, failure: &Failure, tried: &mut Tried) -> ApiError {
    health::doubt(app, worker, failure);
    if matches!(failure, Failure::Connect { .. }) {
        tried.unreachable(worker)
    } else {
        tried.failed(worker)
    }
    failure.to_api_error(worker)
}

/// The error of a request that no worker of this side could serve: what the last one said, where it said something.
fn give_up(side: Side, last: Option<ApiError>) -> ApiError {
    match last {
        Some(error) if error.status != http::StatusCode::SERVICE_UNAVAILABLE => error,
        Some(error) => no_worker(side, Some(&error.message)),
        None => no_worker(side, None),
    }
}
