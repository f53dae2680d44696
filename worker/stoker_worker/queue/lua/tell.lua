-- Adds to the stream of a run's text. The execution is gone once the job has ended or was taken away: such a run writes
-- nothing any more. An entry of kind `more` continues earlier entries, and is of no use without them.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
if ARGV[3] == 'whole' then
  redis.call('XADD', KEYS[2], 'MAXLEN', 1, '*', 'run', ARGV[2], 'kind', ARGV[3], 'text', ARGV[4],
    'markers', ARGV[5])
else
  if redis.call('EXISTS', KEYS[2]) == 0 then return -1 end
  redis.call('XADD', KEYS[2], '*', 'run', ARGV[2], 'kind', ARGV[3], 'text', ARGV[4])
end
redis.call('EXPIRE', KEYS[2], ARGV[1])
return 1
