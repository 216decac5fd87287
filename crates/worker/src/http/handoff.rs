//! A request's part in a handoff.

use std::sync::Arc;
use std::time::Instant;

use protocol::handoff::{EmbeddedParams, Extras, HANDOFF, KV_TRANSFER_PARAMS, TRANSPORT, Want};
use protocol::{ApiError, Body, TransferParams};

use super::App;
use super::generation::gone;
use crate::engine_thread::PinGuard;
use crate::transfer::wire::{self, Pull};
use crate::transfer::{Claim, pull};

/// What a request's `kv_transfer_params` make of it.
pub(super) enum Handoff {
    /// Nothing: the whole request runs here.
    None,
    /// Its blocks are held for another worker.
    Send,
    /// Its blocks come from another worker.
    Receive(Claim),
}

impl Handoff {
    /// Reads a request's part. To be called first: from then on whatever goes wrong with the request frees the blocks that
    /// another worker holds for it.
    ///
    /// # Errors
    /// 400 where the parameters are damaged, of another engine, or ask for what this worker's role forbids.
    pub(super) fn read(app: &App, body: &Body) -> Result<Self, ApiError> {
        let Some(params) = TransferParams::of_request(body)? else {
            return Ok(Self::None);
        };
        let role = app.config.role;
        let misuse = |what: &str| {
            ApiError::kv_transfer_incompatible(format!(
                "this worker's role is `{role}`: it does not {what}"
            ))
        };
        match (params.do_remote_decode()?, params.do_remote_prefill()?) {
            (false, false) => Ok(Self::None),
            (true, true) => Err(ApiError::invalid_param(
                KV_TRANSFER_PARAMS,
                "expected one of `do_remote_decode` and `do_remote_prefill` to be true, got both",
            )),
            (true, false) if !role.sends() => Err(misuse("hold blocks for other workers")),
            (true, false) => Ok(Self::Send),
            (false, true) => {
                let params = EmbeddedParams::read(&params)?;
                let claim = Claim::new(params, app.config.transfer_timeout, app.tasks.clone());
                if role.receives() {
                    Ok(Self::Receive(claim))
                } else {
                    Err(misuse("take blocks from other workers"))
                }
            }
        }
    }
}

/// What the request wants to be told beside its tokens.
///
/// # Errors
/// 400 where it cannot be told: in a stream, or when only half of the request runs here.
pub(super) fn want(
    body: &Body,
    handoff: &Handoff,
    stream: bool,
    stop: &[String],
) -> Result<Option<Want>, ApiError> {
    let Some(want) = Want::of_request(body)? else {
        return Ok(None);
    };
    let refuse = |why: &str| {
        Err(ApiError::invalid_param(
            KV_TRANSFER_PARAMS,
            format!("counts and gate sums {why}"),
        ))
    };
    if stream {
        return refuse("come in replies that are not streamed");
    }
    if !matches!(handoff, Handoff::None) {
        return refuse("come from a worker that runs the whole request");
    }
    if !stop.is_empty() {
        return refuse("do not go together with stop strings");
    }
    Ok(Some(want))
}

/// Brings a prompt's blocks over: pins those that are here and pulls the others.
///
/// # Errors
/// The pull failed (502, to be tried again from prefill), or the two sides do not fit together (400).
pub(super) async fn receive(
    app: &App,
    mut claim: Claim,
    prompt: &[u32],
) -> Result<(PinGuard, Vec<u8>), ApiError> {
    let params = claim.params().clone();
    if params.remote_num_tokens as usize != prompt.len() {
        return Err(ApiError::kv_transfer_incompatible(format!(
            "expected blocks of this prompt's {} tokens, got parameters for {}",
            prompt.len(),
            params.remote_num_tokens
        )));
    }
    let pin = app.engine.pin(Arc::from(prompt)).await.map_err(gone)?;
    let ask = Pull {
        ticket: pull::ticket(&params),
        prompt_digest: wire::prompt_digest(prompt),
        prompt_tokens: params.remote_num_tokens,
        geometry_digest: app.geometry_digest,
        first_block: pin.blocks() as u32,
    };
    let limit = app.geometry.payload_bytes(prompt.len(), pin.blocks());
    let begin = Instant::now();
    match pull::pull(&params, &ask, limit, app.config.transfer_timeout).await {
        Ok(payload) => {
            claim.fulfilled();
            app.metrics.pulled(payload.len(), begin.elapsed());
            Ok((pin, payload))
        }
        Err(error) => {
            app.metrics.pull_failed(error.reason());
            tracing::warn!(request = params.remote_request_id, %error, "cannot pull a request's blocks");
            Err(error.to_api(&params))
        }
    }
}

/// Frees what a request's `kv_transfer_params` name, if this run of this worker gave them, or what its `handoff` names.
///
/// # Errors
/// 400 where both are missing, or damaged.
pub(super) async fn release(app: &App, request: axum::extract::Request) -> Result<(), ApiError> {
    let body = super::read(request).await?;
    if let Some(name) = body.str(HANDOFF)? {
        app.engine.forget(name);
        return Ok(());
    }
    let params = TransferParams::of_request(&body)?.ok_or_else(|| {
        ApiError::invalid_param(
            KV_TRANSFER_PARAMS,
            format!("the field `{KV_TRANSFER_PARAMS}` is required"),
        )
    })?;
    let params = EmbeddedParams::read(&params)?;
    if params.remote_engine_id == *app.engine_id
        && let Err(error) = app.engine.release(&params.remote_request_id).await
    {
        tracing::debug!(
            request = params.remote_request_id,
            why = error.message,
            "nothing to release"
        );
    }
    Ok(())
}

/// What the prefill side answers: where the blocks are, and the prompt's expert counts.
pub(super) fn reply(
    app: &App,
    id: engine::RequestId,
    prompt_tokens: u32,
    cached_tokens: u32,
    extras: &Extras,
) -> Result<TransferParams, ApiError> {
    let blocks = app.geometry.blocks(prompt_tokens as usize) as u32;
    let params = EmbeddedParams {
        do_remote_prefill: true,
        do_remote_decode: false,
        remote_block_ids: vec![(0..blocks).collect()],
        remote_engine_id: app.engine_id.to_string(),
        remote_request_id: id.to_string(),
        remote_host: app.transfer_host.clone(),
        remote_port: app.transfer_port,
        tp_size: 1,
        remote_num_tokens: prompt_tokens,
        remote_prefill_cached_tokens: cached_tokens,
        transfer_mode: "pull".into(),
        transport: TRANSPORT.into(),
    };
    params
        .into_params(Some(extras))
        .map_err(|error| ApiError::internal(format!("cannot write transfer parameters: {error}")))
}
