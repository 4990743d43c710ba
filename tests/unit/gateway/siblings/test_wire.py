"""The end of a connection while questions are under way: every asker is told, nothing is left to complain later."""

import asyncio
import gc

from gateway.siblings.wire import Talk


class Choking:
    """A writer whose other side takes nothing and then is gone."""

    def __init__(self):
        self.gone = asyncio.Event()

    def write(self, data):
        pass

    async def drain(self):
        await self.gone.wait()
        raise ConnectionResetError("Connection reset by peer")

    def close(self):
        self.gone.set()

    async def wait_closed(self):
        pass


async def nobody(what, arguments):
    raise AssertionError("nothing is asked here")


async def end_of_a_question():
    """What its asker learns when the other side goes while the question is being sent."""
    reader = asyncio.StreamReader()
    talk = Talk(reader, Choking(), nobody)
    running = asyncio.create_task(talk.run())
    asking = asyncio.create_task(talk.ask_patiently("metrics"))
    await asyncio.sleep(0)
    reader.feed_eof()
    await running
    (end,) = await asyncio.gather(asking, return_exceptions=True)
    return str(end)


async def test_who_asks_learns_of_the_end_and_the_answer_that_nobody_waits_for_is_no_error():
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    assert await end_of_a_question() == "Connection reset by peer"
    await asyncio.sleep(0)  # the loop holds on to what woke this task
    gc.collect()
    assert complaints == []
