"""The endpoints /v1/files: upload, list, retrieve, download and delete. Owns nothing: the files are in the store."""

import asyncio
import shutil
from typing import Final

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from stoker.api.failure import Failure
from stoker.api.fields import drop_unknown
from stoker.serve.responses import Json, page_of
from stoker.serve.store import BatchStore, FileStore, StoredFile

PURPOSE: Final = "batch"
_FIELD_BYTES: Final = 4096
"""Largest field of the form besides the file; these fields are held in memory."""


async def upload(request: Request) -> Response:
    """Raises `Failure`: it is not a form with a file and the purpose ``batch``."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise Failure(415, "the Content-Type must be multipart/form-data", code="unsupported_content_type")
    async with request.form(max_files=1, max_fields=16, max_part_size=_FIELD_BYTES) as form:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise Failure(400, "'file' is missing", code="missing_required_parameter", param="file")
        if form.get("purpose") != PURPOSE:
            raise Failure(400, f"'purpose' must be {PURPOSE}", code="invalid_value", param="purpose")
        for field in set(form) - {"file", "purpose"}:  # a form has ``expires_after[seconds]``
            drop_unknown(field.partition("[")[0], request.url.path, request.app.state.backend.settings.body_options)
        source, name = file.file, (file.filename or "upload")[:255]
        files: FileStore = request.app.state.files
        owner = request.state.owner
        stored = await asyncio.to_thread(
            files.add, owner, name, PURPOSE, lambda content: shutil.copyfileobj(source, content)
        )
    return Json(stored.as_object())


async def list_files(request: Request) -> Response:
    """Newest first, unless `order` is ``asc``; `purpose` filters."""
    files: FileStore = request.app.state.files
    found = await asyncio.to_thread(files.all_of, request.state.owner)
    if purpose := request.query_params.get("purpose"):
        found = [file for file in found if file.purpose == purpose]
    if request.query_params.get("order") == "asc":
        found.reverse()
    return Json(page_of([file.as_object() for file in found], request.query_params, most=10_000))


async def retrieve(request: Request) -> Response:
    return Json((await _file(request)).as_object())


async def content(request: Request) -> FileResponse:
    files: FileStore = request.app.state.files
    return FileResponse(files.content(await _file(request)), media_type="application/octet-stream")


async def delete(request: Request) -> Response:
    """Raises `Failure`: a batch that has not ended reads the file."""
    file = await _file(request)
    batches: BatchStore = request.app.state.batches
    if await asyncio.to_thread(batches.reads, file.id):
        raise Failure(409, f"a batch still reads {file.id}", code="file_in_use")
    await asyncio.to_thread(request.app.state.files.remove, file)
    return Json({"id": file.id, "object": "file", "deleted": True})


async def _file(request: Request) -> StoredFile:
    files: FileStore = request.app.state.files
    return await asyncio.to_thread(files.get, request.state.owner, request.path_params["file_id"])
