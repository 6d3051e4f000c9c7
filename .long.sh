source .whl/activate >/dev/null 2>&1
nvidia-smi --query-gpu=name --format=csv,noheader; free -g | sed -n 2p
timeout 300 python -m benchmarks.long_rows --tokens 131072 --steps 3 --folder /tmp/l 2>&1 | grep "lora {" | cut -c1-1800
grep -E "^plan|^done" /tmp/l/131072-1.log | cut -c1-260
cp /tmp/l/*.log $OUT/
nohup setsid timeout 1100 python -m benchmarks.long_rows --tokens 524288 --steps 1 --folder /tmp/l > /tmp/l/long.out 2>&1 &
sleep 5; for i in $(seq 1 28); do sleep 10; kill -0 $! 2>/dev/null || break; done; cat /tmp/l/long.out | grep "lora {"; tail -5 /tmp/l/524288-1.log | cut -c1-300; nvidia-smi --query-gpu=memory.used,utilization.gpu --format=csv,noheader
